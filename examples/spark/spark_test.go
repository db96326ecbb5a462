package spark

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// vocabulary makes a tokenizer of Hugging Face's, its parts, a model's tokenizer, and a module with one's own.
const vocabulary = `
import sys
import tokenizers
import transformers
directory = sys.argv[1]
t = tokenizers.ByteLevelBPETokenizer()
t.train_from_iterator(["%d äß中😀\n" % n for n in range(500)], vocab_size=400, special_tokens=["<|endoftext|>"])
t.save_model(directory)
t.save(directory + "/tokenizer.json")
transformers.PreTrainedTokenizerFast(tokenizer_file=directory + "/tokenizer.json", eos_token="<|endoftext|>"
                                     ).save_pretrained(directory + "/model")
with open(directory + "/words.py", "w") as f:
    f.write("""
class Words:
    vocab_size, eod = 100000, 70000
    def tokenize(self, text):
        return [len(word) + 66000 for word in text.split()]
def build(args):
    return Words()
""")
`

// TestSpark compares the data sets of Spark with those of one process: in local mode, by spark-submit, on a cluster of
// two executors. "make e2e-spark".
func TestSpark(t *testing.T) {
	venv := os.Getenv("DLROVER_SPARK")
	if venv == "" {
		t.Skip("SKIPPED: NO SPARK IS STARTED; make e2e-spark does that")
	}
	python, submit := filepath.Join(venv, "bin/python"), filepath.Join(venv, "bin/spark-submit")
	t.Setenv("PYSPARK_PYTHON", python)
	c := newCorpus(t)
	out, err := c.run(t, python, "-c", vocabulary, c.dir)
	require.NoError(t, err, out)
	words := filepath.Join(c.dir, "words.py")
	t.Setenv("PYTHONPATH", c.dir)

	for name, run := range map[string]struct{ start, args []string }{
		"local mode":   {[]string{python}, []string{"--partitions=5", "--workers=2", "--ftfy"}},
		"spark-submit": {[]string{submit, "--master", "local[3]"}, []string{"--partitions=40"}},
		"tokenizer.json": {[]string{python}, []string{"--tokenizer-type=HFTokenizer", "--partitions=3",
			"--vocab=" + filepath.Join(c.dir, "tokenizer.json")}},
		"a cluster, relative paths": {[]string{submit, "--master", "local-cluster[2,1,1024]"},
			[]string{"--tokenizer-type=GPT2BPETokenizer", "--partitions=3", "--vocab-file", relative(t, c, "vocab.json"),
				"--merge-file", relative(t, c, "merges.txt")}},
		"a model's tokenizer": {[]string{python}, []string{"--tokenizer-type=HuggingFaceTokenizer", "--partitions=3",
			"--tokenizer-model", filepath.Join(c.dir, "model")}},
		"a cluster, own tokenizer": {[]string{submit, "--master", "local-cluster[2,1,1024]", "--py-files", words},
			[]string{"--tokenizer-type=words:build", "--partitions=7"}},
	} {
		t.Run(name, func(t *testing.T) {
			c.single(t, python, "single", run.args...)
			out, err := c.run(t, append(append(run.start, program), c.args("spark", run.args...)...)...)
			require.NoError(t, err, out)
			c.same(t, "single", "spark")
			require.Len(t, indexed(t, filepath.Join(c.dir, "spark_text_document")), len(c.texts))
		})
	}

	want := c.spoil(t)
	out, err = c.run(t, append([]string{python, program}, c.args("bad", "--partitions=9")...)...)
	require.ErrorContains(t, err, "exit status 1")
	for _, line := range want {
		require.Contains(t, out, line)
	}
}

func relative(t *testing.T, c *corpus, name string) string {
	t.Helper()
	here, err := os.Getwd()
	require.NoError(t, err)
	path, err := filepath.Rel(here, filepath.Join(c.dir, name))
	require.NoError(t, err)
	return path
}
