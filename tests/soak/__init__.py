"""A soak: random trouble for every command, for as long as there is time, with one table at the end."""
