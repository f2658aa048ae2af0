"""Text to batches. The room from its door to its window, a line for each stage:

    get and read    download, streams, records, wikipedia, parsing, sentences   any file to sentences (extract)
    words           text, tokenizer                                             lines to numbers, and vocabularies
    rows            examples, reference, assembly                               what makes a row; MLPerf's own
    many hands      units, engines, processes, progress                         the same rows, many makers (prepare)
    the Block       block                                                       rows in flat arrays, between all these
    on disk         shards, write                                               our layout
                    layouts, hdf5, ragged, tfrecord, index, foreign             other people's (source opens either)
    any to any      convert, pack, mlperf_data                                  order, files and packs of them
    to look at      inspect, stats, verify
    for training    batching, packing, nnls, masking, batch, loader, balance    steps, bins and the Batch

`choices` names what options leave open. Nothing is imported here.
"""
