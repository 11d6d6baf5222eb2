"""octavo on Ray. Needs the package `ray`."""
