"""Operations, one in each module, with their plain versions: see `octavo.kernels.operation`."""
