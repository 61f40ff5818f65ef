"""The strategies with variables on servers, and `Server`, which does the work of one rank."""
