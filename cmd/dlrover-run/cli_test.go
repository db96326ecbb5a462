package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"dlrover-run/launcher/argv"
)

func TestFlagsKeepTheNamesThatTheLibraryGivesThem(t *testing.T) {
	opts := argv.Options()
	plain, quick := newApp(opts, nil), withNames(newApp(opts, nil), opts)
	for i, f := range plain.Flags {
		require.Equal(t, f.Names(), quick.Flags[i].Names())
	}
}
