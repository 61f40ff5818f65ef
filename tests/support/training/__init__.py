"""What tests train, and in which ways."""
