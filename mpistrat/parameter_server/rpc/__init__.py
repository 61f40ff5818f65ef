"""Calls from one rank to another: the messages, and who waits for which answer."""
