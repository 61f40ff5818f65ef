"""How a rank reads and changes arrays and variables on servers."""
