"""Everything with files, clocks and prints."""
