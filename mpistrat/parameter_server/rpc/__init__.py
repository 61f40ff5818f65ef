"""Calls from one rank to another: messages, requests, replies, and memory that processes share."""
