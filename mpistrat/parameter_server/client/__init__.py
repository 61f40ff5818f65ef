"""How a rank reads and changes arrays on servers, and its variables there."""
