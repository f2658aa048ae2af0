"""Text to batches, in four stages, each a folder that imports only those before it: text, formats, prepare, feed."""
