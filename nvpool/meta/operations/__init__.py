"""Operations on names and attributes, one module each: decisions on records, without waiting."""
