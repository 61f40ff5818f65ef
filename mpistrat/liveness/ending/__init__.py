"""Ends the job when a rank fails, is interrupted or leaves early; otherwise ranks wait for each other at the end."""
