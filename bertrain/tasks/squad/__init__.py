"""SQuAD 1.1 and 2.0: windows over long contexts, answers, official scores."""
