"""The protocol of clients and servers: messages, arrays in shared memory, numbered updates, snapshots, clocks."""
