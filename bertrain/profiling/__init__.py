"""Short runs that measure a machine, and reports on what they found."""
