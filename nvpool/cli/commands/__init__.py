"""Commands of nvpool, one module each."""
