"""Typed settings with help texts, recipes, and their resolution from recipe, file and command line."""
