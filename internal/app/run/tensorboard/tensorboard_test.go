package tensorboard

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseBoard(t *testing.T) {
	for text, want := range map[string]board{
		"logs":                        {LogDir: "logs", Host: "127.0.0.1", Port: 6006},
		"logs:6007":                   {LogDir: "logs", Host: "127.0.0.1", Port: 6007},
		"/a/b:0.0.0.0:80":             {LogDir: "/a/b", Host: "0.0.0.0", Port: 80},
		"s3://bucket/logs":            {LogDir: "s3://bucket/logs", Host: "127.0.0.1", Port: 6006},
		"s3://bucket/logs:6008":       {LogDir: "s3://bucket/logs", Host: "127.0.0.1", Port: 6008},
		"s3://bucket/logs:[::1]:6008": {LogDir: "s3://bucket/logs", Host: "::1", Port: 6008},
	} {
		got, err := parseBoard(text)
		require.NoError(t, err, text)
		require.Equal(t, want, got, text)
	}
	for _, text := range []string{"logs:", "logs:0", "logs:65536", "logs:x", ":6006", "logs::6006", "::"} {
		_, err := parseBoard(text)
		require.ErrorContains(t, err, "need LOGDIR", text)
	}
}

func FuzzParseBoard(f *testing.F) {
	f.Add("logs:6006")
	f.Add("s3://a/b:[::1]:1")
	f.Fuzz(func(t *testing.T, text string) {
		if b, err := parseBoard(text); err == nil && text != "" {
			require.NotEmpty(t, b.LogDir)
			require.NotEmpty(t, b.Host)
			require.True(t, b.Port > 0 && b.Port < 65536)
		}
	})
}
