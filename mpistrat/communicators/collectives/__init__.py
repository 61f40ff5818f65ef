"""The collectives: each file has one of them, as a value with its operands, its checks and its results."""
