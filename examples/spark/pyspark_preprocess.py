"""Turns JSON lines into data sets in Megatron's indexed format, with Spark or in one process.

    python pyspark_preprocess.py --input data.jsonl --output-prefix out --append-eod    # Spark's local mode
    spark-submit ... pyspark_preprocess.py --input ...                                  # any cluster
    python pyspark_preprocess.py --single-process --input ...                           # without Spark

Each line is an object, and a document: the text at each of --json-keys, or the list of texts. The document becomes the
tokens of its text, and each text of a list a sequence of them, in PREFIX_KEY_document.bin and .idx. The documents keep
the order of the files and of their lines, so all three ways write the same bytes. Spark's executors need the file
systems of the input and of the output under the same paths.
"""
import argparse
import contextlib
import glob
import gzip
import importlib.util
import itertools
import json
import os
import shutil
import struct
import sys
import tempfile
import threading
import uuid
from array import array

PIECE = 64 << 20  # bytes of input for a task
MOST_NAMED = 20  # bad lines that are named


def parse(argv):
    p = argparse.ArgumentParser(usage="%(prog)s --input FILE... --output-prefix PREFIX [options]",
                                description=__doc__.split("\n")[0])
    p.add_argument("--input", nargs="+", required=True, metavar="FILE",
                   help="files, or patterns such as 'data/*.jsonl', with spaces or commas between; also .gz")
    p.add_argument("--json-keys", "--jsonl-keys", nargs="+", default=["text"], metavar="KEY",
                   help="keys of the texts; each gets a data set of its own (default: text)")
    p.add_argument("--output-prefix", required=True, metavar="PREFIX")
    p.add_argument("--dataset-impl", default="mmap", choices=["mmap"], help="the format (default: mmap)")
    p.add_argument("--tokenizer-type", default="CharLevelTokenizer", metavar="TYPE",
                   help="CharLevelTokenizer: a token for each byte of UTF-8, end of document 0 (the default); "
                        "HFTokenizer: the tokenizer.json at --vocab-file; GPT2BPETokenizer: --vocab-file and "
                        "--merge-file (both need the package tokenizers); HuggingFaceTokenizer, HFGPT2Tokenizer: "
                        "--tokenizer-model (needs transformers); MODULE:FUNCTION: the function gets the arguments, and "
                        "returns an object with tokenize(text), vocab_size and eod")
    p.add_argument("--vocab-file", metavar="FILE")
    p.add_argument("--merge-file", metavar="FILE")
    p.add_argument("--tokenizer-model", metavar="DIR", help="directory of a tokenizer of transformers")
    p.add_argument("--append-eod", action="store_true", help="append an end-of-document token to each document")
    p.add_argument("--ftfy", action="store_true", help="repair broken Unicode (needs the package ftfy)")
    p.add_argument("--bad-lines", default="fail", choices=["fail", "skip"],
                   help="lines without a text: fail writes nothing, skip leaves them out; both name the first %d of "
                        "them (default: fail)" % MOST_NAMED)
    p.add_argument("--partitions", type=positive, metavar="N",
                   help="about how many pieces the input is divided into (default: one for each 64 MiB)")
    p.add_argument("--workers", type=positive, metavar="N",
                   help="pieces at a time, in Spark's local mode (default: one for each CPU)")
    p.add_argument("--single-process", action="store_true", help="without Spark, one piece after the other")
    p.add_argument("--num-docs", type=positive, metavar="N",
                   help="documents of the input, for lines about the progress")
    p.add_argument("--log-interval", type=positive, default=1000, metavar="N",
                   help="documents between lines about the progress, one in a second at most (default: 1000)")
    args = p.parse_args(["--" + name[2:].replace("_", "-") + rest if name.startswith("--") else name + rest
                         for name, rest in map(split_option, argv)])
    check(p, args)
    return args


def split_option(word):
    """Is an option's name, and the rest of the word: names may have _ or -, as in torchrun."""
    name, equals, value = word.partition("=") if word.startswith("--") else (word, "", "")
    return name, equals + value


def positive(text):
    n = int(text)
    if n < 1:
        raise ValueError
    return n


def check(p, args):
    """Ends the program for arguments that cannot work, before anything is started."""
    names = [name for word in args.input for name in word.split(",") if name]
    for name in names:
        if "://" in name or "://" in args.output_prefix:
            p.error("%s: only files of mounted file systems can be read and written" % (
                name if "://" in name else args.output_prefix))
        if name.endswith((".zst", ".bz2", ".xz", ".tar", ".zip")):
            p.error("%s: of compressed files only .gz is read; unpack it" % name)
    args.paths = []
    for name in names:
        found = [name] if os.path.isfile(name) else sorted(filter(os.path.isfile, glob.glob(name)))
        if not found:
            p.error("--input: there is no file %s" % name)
        args.paths += map(os.path.abspath, found)
    args.output_prefix = os.path.abspath(args.output_prefix)
    for option in ("vocab_file", "merge_file", "tokenizer_model"):
        if os.path.exists(getattr(args, option) or ""):  # a model can be a name, too
            setattr(args, option, os.path.abspath(getattr(args, option)))  # executors have other working directories
    if not os.path.isdir(os.path.dirname(args.output_prefix)):
        p.error("--output-prefix: there is no directory %s" % os.path.dirname(args.output_prefix))
    if not os.access(os.path.dirname(args.output_prefix), os.W_OK):
        p.error("--output-prefix: %s cannot be written to" % os.path.dirname(args.output_prefix))
    if not args.single_process and importlib.util.find_spec("pyspark") is None:
        p.error("pyspark is not installed: pip install pyspark, which needs Java, or use --single-process")
    if args.single_process and args.workers:
        print("--workers has no effect with --single-process", file=sys.stderr)
    for key in args.json_keys:
        if os.sep in key or "\0" in key or args.json_keys.count(key) > 1:
            p.error("--json-keys: %r is given twice, or cannot be part of a file's name" % key)
    try:
        tokenizer = build_tokenizer(args)
        if args.ftfy:
            importlib.import_module("ftfy")
    except ImportError as e:
        own = e.name == args.tokenizer_type.partition(":")[0]
        p.error("%s, which %s needs: %s" % (
            e, "--ftfy" if e.name == "ftfy" else "--tokenizer-type=" + args.tokenizer_type,
            "put its directory into PYTHONPATH" if own else "install it here, and for the executors"))
    except (ValueError, OSError) as e:
        p.error("--tokenizer-type=%s: %s" % (args.tokenizer_type, e))
    if args.append_eod and tokenizer.eod is None:
        p.error("--append-eod: the tokenizer has no end-of-document token, such as <|endoftext|>")
    # As Megatron chooses the type of tokens, and its code in the index.
    args.token_type, args.token_code = ("H", 8) if tokenizer.vocab_size < 65500 else ("i", 4)


class Tokenizer:
    def __init__(self, tokenize, vocab_size, eod):
        self.tokenize, self.vocab_size, self.eod = tokenize, vocab_size, eod


def build_tokenizer(args):
    kind = args.tokenizer_type
    if kind == "CharLevelTokenizer":
        return Tokenizer(lambda text: text.encode(), 512, 0)
    if kind in ("HFTokenizer", "GPT2BPETokenizer"):
        import tokenizers
        if not args.vocab_file or kind == "GPT2BPETokenizer" and not args.merge_file:
            raise ValueError("--vocab-file is missing, or --merge-file")
        for path in filter(None, (args.vocab_file, args.merge_file)):
            open(path).close()  # the package's own message has no name
        if kind == "HFTokenizer":
            t = tokenizers.Tokenizer.from_file(args.vocab_file)
        else:
            t = tokenizers.ByteLevelBPETokenizer(args.vocab_file, args.merge_file)
        return Tokenizer(lambda text: t.encode(text).ids, t.get_vocab_size(), t.token_to_id("<|endoftext|>"))
    if kind in ("HuggingFaceTokenizer", "HFGPT2Tokenizer"):
        if not args.tokenizer_model:
            raise ValueError("--tokenizer-model is missing")
        import transformers
        t = transformers.AutoTokenizer.from_pretrained(args.tokenizer_model)
        return Tokenizer(lambda text: t(text).input_ids, len(t), t.eos_token_id)
    module, colon, function = kind.partition(":")
    if not colon:
        raise ValueError("want CharLevelTokenizer, HFTokenizer, GPT2BPETokenizer, HuggingFaceTokenizer, "
                         "HFGPT2Tokenizer or MODULE:FUNCTION")
    return getattr(importlib.import_module(module), function)(args)


def divide(paths, partitions):
    """Divides files into pieces: number, path, first byte, and the byte after the last one.

    A line belongs to the piece with its first byte.
    """
    sizes = [os.path.getsize(path) for path in paths]
    most = max(1, -(-sum(sizes) // partitions)) if partitions else PIECE
    out = []
    for path, size in zip(paths, sizes):
        step = size if path.endswith(".gz") else most  # the middle of a compressed file cannot be read alone
        for start in range(0, size, max(1, step)):
            out.append((len(out), path, start, min(size, start + step)))
    return out


def lines(path, start, end):
    if path.endswith(".gz"):
        with gzip.open(path, "rb") as f:
            yield from f
        return
    with open(path, "rb") as f:
        if start > 0:
            f.seek(start - 1)
            f.readline()  # the rest of a line that began before
        at = f.tell()
        while at < end:
            line = f.readline()
            if not line:
                raise EOFError("%s has become shorter" % path)
            at += len(line)
            yield line


def convert(piece, args, directory, count=lambda: None):
    """Writes the parts of all data sets for a piece of the input.

    Returns how many lines and documents it has, how many of the lines are bad, and the first of those by their position
    in the piece.
    """
    number, path, start, end = piece
    tokenizer = build_tokenizer(args)
    total = {"path": path, "lines": 0, "documents": 0, "bad": 0, "named": []}
    with contextlib.ExitStack() as stack:
        parts = [stack.enter_context(Part(part_name(directory, number, i), args)) for i in range(len(args.json_keys))]
        for line in lines(path, start, end):
            total["lines"] += 1
            if not line.strip():
                continue
            try:
                document = texts(line, args)
            except ValueError as e:
                total["bad"] += 1
                if total["bad"] <= MOST_NAMED:
                    total["named"].append((total["lines"], str(e)))
                continue
            for part, sentences in zip(parts, document):
                part.add(sentences, tokenizer)
            total["documents"] += 1
            count()
    return total


def texts(line, args):
    """Is the texts of a line, a list for each key. ValueError: why it is bad."""
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as e:
        raise ValueError("no UTF-8 at byte %d" % e.start) from None
    except RecursionError:
        raise ValueError("too deeply nested") from None
    if not isinstance(record, dict):
        raise ValueError("no object, but %s" % type(record).__name__)
    out = []
    for key in args.json_keys:
        if key not in record:
            raise ValueError("no key %r" % key)
        sentences = record[key] if isinstance(record[key], list) else [record[key]]
        for text in sentences:
            if not isinstance(text, str):
                raise ValueError("no text at key %r, but %s" % (key, type(text).__name__))
            try:
                text.encode()
            except UnicodeEncodeError as e:
                raise ValueError("half a character (\\u%04x) at key %r" % (ord(text[e.start]), key)) from None
        if args.ftfy:
            import ftfy
            sentences = [ftfy.fix_text(text) for text in sentences]
        out.append(sentences)
    return out


def part_name(directory, number, key):
    return os.path.join(directory, "%d.%d" % (number, key))


class Part:
    """A part of a data set.

    NAME.bin has its tokens, NAME.lengths the lengths of its sequences, NAME.counts the sequences of each document. They
    get these names when they are whole: Spark may run a task twice, and at the same time.
    """

    def __init__(self, name, args):
        self.name, self.args = name, args
        self.lengths, self.counts = array("i"), array("i")
        self.temporary = "%s.%s" % (name, uuid.uuid4())

    def __enter__(self):
        self.file = open(self.temporary, "wb")
        return self

    def add(self, sentences, tokenizer):
        sequences = [list(ids) for ids in map(tokenizer.tokenize, sentences) if len(ids) > 0]
        if sequences and self.args.append_eod:
            sequences[-1].append(tokenizer.eod)
        self.counts.append(len(sequences))
        for ids in sequences:
            try:
                tokens = array(self.args.token_type, ids)
            except OverflowError:
                raise ValueError("token %d of a tokenizer with a vocabulary of %d" % (
                    max(ids), tokenizer.vocab_size)) from None
            self.lengths.append(len(tokens))
            self.file.write(little(tokens))

    def __exit__(self, kind, *_):
        self.file.close()
        if kind is None:
            for suffix, numbers in ((".lengths", self.lengths), (".counts", self.counts)):
                with open(self.temporary + suffix, "wb") as f:
                    f.write(little(numbers))
                os.replace(self.temporary + suffix, self.name + suffix)
            os.replace(self.temporary, self.name + ".bin")


def little(numbers):
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def read(path, kind="i"):
    out = array(kind)
    with open(path, "rb") as f:
        out.frombytes(f.read())
    if sys.byteorder == "big":
        out.byteswap()
    return out


def join(args, directory, pieces, key):
    """Makes a data set of its parts. Returns the numbers of its documents, sequences and tokens."""
    names = [part_name(directory, number, key) for number in range(pieces)]
    whole = os.path.join(directory, "whole")
    with open(whole + ".bin", "wb") as out:
        for name in names:
            with open(name + ".bin", "rb") as part:
                shutil.copyfileobj(part, out, 1 << 20)
    sequences = sum(os.path.getsize(name + ".lengths") // 4 for name in names)
    documents = sum(os.path.getsize(name + ".counts") // 4 for name in names)
    with open(whole + ".idx", "wb") as out:
        out.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, args.token_code, sequences, documents + 1))
        for name in names:
            with open(name + ".lengths", "rb") as part:
                shutil.copyfileobj(part, out)
        size, offset = array(args.token_type).itemsize, 0
        for name in names:
            ends = list(itertools.accumulate((n * size for n in read(name + ".lengths")), initial=offset))
            offset = ends.pop()
            out.write(little(array("q", ends)))
        bound = 0
        for name in names:
            bounds = list(itertools.accumulate(read(name + ".counts"), initial=bound))
            bound = bounds.pop()
            out.write(little(array("q", bounds)))
        out.write(little(array("q", [bound])))
    for suffix in (".bin", ".idx"):
        os.replace(whole + suffix, "%s_%s_document%s" % (args.output_prefix, args.json_keys[key], suffix))
    return documents, sequences, offset // size


@contextlib.contextmanager
def progress(args, count):
    """Writes how many documents are done, every second at most."""
    done, last = threading.Event(), [0]

    def watch():
        while not done.wait(1):
            n = count()
            if n - last[0] >= args.log_interval:
                last[0] = n
                print("%d documents%s" % (n, " of %d" % args.num_docs if args.num_docs else ""), flush=True)
    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def in_this_process(args, directory, pieces):
    done = itertools.count()
    seen = [0]

    def count():
        seen[0] = next(done) + 1
    with progress(args, lambda: seen[0]):
        return [convert(piece, args, directory, count) for piece in pieces]


def with_spark(args, directory, pieces):
    from pyspark import SparkConf, SparkContext
    conf = SparkConf()
    conf.setIfMissing("spark.app.name", "pyspark_preprocess")
    if not conf.contains("spark.master"):
        conf.setMaster("local[%s]" % (args.workers or "*"))
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    elif args.workers:
        print("--workers has no effect: %s decides" % conf.get("spark.master"), file=sys.stderr)
    spark = SparkContext(conf=conf)
    try:
        done = spark.accumulator(0)

        def task(piece):
            total = convert(piece, args, directory)
            done.add(total["documents"])
            return total
        with progress(args, lambda: done.value):
            return spark.parallelize(pieces, max(1, len(pieces))).map(task).collect()
    finally:
        spark.stop()


def bad_lines(totals):
    """Yields the bad lines by file and line, from their positions in the pieces."""
    before = {}
    for total in totals:
        first = before.get(total["path"], 0)
        before[total["path"]] = first + total["lines"]
        for line, why in total["named"]:
            yield "%s:%d: %s" % (total["path"], first + line, why)


def main():
    args = parse(sys.argv[1:])
    pieces = divide(args.paths, args.partitions)
    where, name = os.path.split(args.output_prefix)
    directory = tempfile.mkdtemp(prefix=name + ".parts-", dir=where)
    try:
        os.chmod(directory, 0o777 & ~umask())  # executors may be of another user
        totals = (in_this_process if args.single_process else with_spark)(args, directory, pieces)
        bad = sum(total["bad"] for total in totals)
        for text in itertools.islice(bad_lines(totals), MOST_NAMED):
            print(text, file=sys.stderr)
        if bad:
            print("%d of %d lines are bad" % (bad, sum(total["lines"] for total in totals)), file=sys.stderr)
        if bad and args.bad_lines == "fail":
            return "nothing is written: correct them, or leave them out by --bad-lines=skip"
        for i, key in enumerate(args.json_keys):
            print("%s_%s_document: %d documents, %d sequences, %d tokens of %d bytes" % (
                args.output_prefix, key, *join(args, directory, len(pieces), i), array(args.token_type).itemsize))
    except FileNotFoundError as e:
        return "%s: the executors and this machine need the same file systems, under the same paths" % e
    finally:
        shutil.rmtree(directory)


def umask():
    mask = os.umask(0)
    os.umask(mask)
    return mask


if __name__ == "__main__":
    sys.exit(main())
