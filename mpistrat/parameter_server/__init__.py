"""Variables on ranks of their own: servers, and how the other ranks read and change what lies there."""
