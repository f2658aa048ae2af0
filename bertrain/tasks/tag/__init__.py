"""Token classification: a tag for each word, such as the entities of CoNLL files."""
