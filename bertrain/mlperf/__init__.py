"""MLPerf experiments, logs and checks."""
