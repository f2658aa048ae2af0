"""Raw files to documents of sentences and token ids: download, extract, tokenize."""
