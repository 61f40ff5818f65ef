"""What clients and servers agree on: messages, arrays in them and in shared memory, both sides of each guarantee."""
