"""What other libraries say of their own functions, and what the package uses of them."""
