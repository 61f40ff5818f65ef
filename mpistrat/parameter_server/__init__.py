"""Variables on parameter servers: the servers, and how the other ranks read and change the variables."""
