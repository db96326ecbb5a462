package help

import (
	"bytes"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/urfave/cli/v2"
)

func TestPrint(t *testing.T) {
	long := strings.Repeat("word ", 30) + strings.Repeat("x", 120)
	app := &cli.App{Name: "prog", Usage: "does things", Description: "More about it.", Flags: []cli.Flag{
		&cli.StringFlag{Name: "zeta", Aliases: []string{"z"}, Category: "First", Usage: "`PATH`: where to"},
		&cli.BoolFlag{Name: "alpha", Category: "First", Usage: long},
		&cli.BoolFlag{Name: "hidden", Category: "First", Hidden: true, Usage: "not shown"},
		&cli.BoolFlag{Name: "help", Category: "Second", Usage: "this"},
	}}
	var out bytes.Buffer
	Print(&out, app, "[options]")
	indent := strings.Repeat(" ", 8)
	require.Equal(t, `prog - does things

usage: prog [options]

More about it.

First:
  -z, --zeta PATH
        where to
  --alpha
`+indent+strings.TrimSpace(strings.Repeat("word ", 18))+"\n"+indent+strings.TrimSpace(strings.Repeat("word ", 12))+"\n"+indent+strings.Repeat("x", 120)+`

Second:
  --help
        this
`, out.String())
}
