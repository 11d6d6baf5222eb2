"""An engine before its first step: what a checkpoint's files say, and the process that runs its core. No torch here."""
