"""Main functions of the daemons."""
