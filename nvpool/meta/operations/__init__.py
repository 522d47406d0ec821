"""One module for each operation on names and attributes: decisions on records, without waiting."""
