"""`mpistrat verify`: compares a program's training on several ranks with its training on one rank."""
