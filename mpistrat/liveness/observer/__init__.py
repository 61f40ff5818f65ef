"""The observer: a process per node that reads the ranks' records, and reports ranks that die or wait too long."""
