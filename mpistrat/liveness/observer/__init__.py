"""Who waits and who died: the observer of a node reads the records, and reports."""
