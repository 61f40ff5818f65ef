"""The protocol of clients and servers: messages, arrays in shared memory, and both sides of each guarantee."""
