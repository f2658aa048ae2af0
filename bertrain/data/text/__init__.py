"""Raw files to documents, sentences and token ids: download, extract, tokenize."""
