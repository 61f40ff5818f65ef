"""The strategies with variables on servers, and the `Server` of a rank with a task."""
