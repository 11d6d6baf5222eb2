"""Operations, one in each module."""
