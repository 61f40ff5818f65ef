"""What the tests of torch_xla share."""
