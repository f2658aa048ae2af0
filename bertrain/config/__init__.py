"""Every setting, typed, with its help; recipes; and how recipe, file and command line become one set of settings."""
