"""Text to batches, in four stages. Each is a folder that imports only those before it.

text       download      files over HTTP, resumed and verified
           extract       dumps, archives and tables to plain text: streams -> records -> parsing (wikipedia)
           documents     plain text to lines and documents
           vocabulary, tokenizer, vocabulary_training    words to token ids
           processes, progress    worker pools and progress output
formats    block         examples in flat arrays, which every reader returns and every writer takes
           masking       dynamic masks; packing: sequences into rows
           shards, write    prepared folders: Arrow files with a manifest
           layouts, hdf5, tfrecord, index, foreign    folders of other systems
           source        `open_data`: any of these as a DataSource
           convert, pack, inspect, verify    the commands on data folders
prepare    examples      documents to pairs or full sentences, and to rows of tokens
           reference     the same, exactly as MLPerf's reference script
           units, engines, prepare    in parallel and resumable, to a prepared folder
feed       batching      steps, bins and layouts from lengths alone
           balance, stats    load of the ranks, and statistics of each policy
           assemble      the examples of a bin to a Batch
           loader        the steps of a run, made ahead of time
"""
