"""Models and reports over HTTP: `bertrain serve`, `bertrain watch --web`."""
