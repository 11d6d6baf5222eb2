"""Operations, by module."""
