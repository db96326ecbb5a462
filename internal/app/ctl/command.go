package ctl

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"dlrover-run/internal/help"
	"dlrover-run/internal/text"
)

const self = "dlroverctl"

// each calls f with all commands of a table, those below others included.
func each(commands []*cli.Command, f func(*cli.Command)) {
	for _, c := range commands {
		f(c)
		each(c.Subcommands, f)
	}
}

// finished adds the parts that all commands share: --help, --json, and errors that name the help to read.
func finished(commands ...*cli.Command) []*cli.Command {
	each(commands, func(c *cli.Command) {
		c.HideHelp = true // cli's own option is a variable that all applications of a process share
		c.OnUsageError = func(_ *cli.Context, err error, _ bool) error {
			return fmt.Errorf("%s: %w", nameOf(c), help.Misuse(c.HelpName, err))
		}
		if c.Name != "exec" && c.Name != "top" && c.Subcommands == nil {
			c.Flags = append(c.Flags, &cli.BoolFlag{Name: "json", Usage: "print JSON instead of text"})
		}
		c.Flags = append(c.Flags, helpOption())
		action := c.Action
		c.Action = func(args *cli.Context) error {
			if err := checkArguments(c, args.Args().Slice()); err != nil {
				return err
			}
			return action(args)
		}
	})
	return commands
}

func helpOption() cli.Flag {
	return &cli.BoolFlag{Name: "help", Aliases: []string{"h"}, Usage: "show this text, and exit"}
}

// nameOf is a command as it is typed, without the program.
func nameOf(c *cli.Command) string { return strings.TrimPrefix(c.HelpName, self+" ") }

// behindDashes in ArgsUsage marks the words behind "--" as another command's arguments.
const behindDashes = " [-- ARGUMENTS]"

// checkArguments compares the words of a command line with ArgsUsage: WORD must be there, [WORD] may be, and WORD...
// stands for any number. A command with others below it has no words of its own.
func checkArguments(c *cli.Command, given []string) error {
	words := strings.Fields(strings.ReplaceAll(strings.TrimSuffix(c.ArgsUsage, behindDashes), "-- ", ""))
	least, most := 0, len(words)
	for i, w := range words {
		if !strings.HasPrefix(w, "[") {
			least++
		}
		if strings.HasSuffix(strings.Trim(w, "[]"), "...") {
			most = max(most, len(given))
		}
		if i < len(given) && strings.Trim(w, "[]") == "RUN" && (given[i] == "." || given[i] == "..") {
			return fmt.Errorf("%s: no run is called %q; give its --rdzv-id", nameOf(c), given[i])
		}
	}
	empty := slices.Contains(given[:min(len(given), len(words))], "")
	if c.Subcommands == nil && !empty && least <= len(given) && len(given) <= most {
		return nil
	}
	return misplaced(c, given)
}

// misplaced is the error of a command that was given other arguments than it takes.
func misplaced(c *cli.Command, given []string) error {
	takes, words := c.ArgsUsage, "nothing"
	if takes == "" {
		takes = "no argument"
	}
	if len(given) > 0 {
		words = strings.Trim(fmt.Sprintf("%q", given), "[]")
	}
	return fmt.Errorf("%s takes %s, but was given %s; see %s --help", nameOf(c), takes, words, c.HelpName)
}

// arrange brings a command line into the order that cli reads: names of commands, options, all other words. Users
// write options anywhere. behind are the words behind "--", for a command that passes them on; nil: there is no
// "--".
func arrange(app *cli.App, args []string) (line, behind []string, err error) {
	own, rest, cut := args[1:], []string(nil), slices.Index(args, "--")
	if cut > 0 {
		own, rest = args[1:cut], append([]string{}, args[cut+1:]...)
	}
	if len(own) > 0 && own[0] == "help" {
		own = append(own[1:len(own):len(own)], "--help")
	}
	var options, words []string
	for i := 0; i < len(own); i++ {
		if len(own[i]) < 2 || own[i][0] != '-' {
			words = append(words, own[i])
			continue
		}
		options = append(options, own[i])
		if takesValue(app, own[i]) {
			if i++; i == len(own) {
				n, _ := commandOf(app, words)
				command := strings.Join(append([]string{self}, words[:n]...), " ")
				return nil, nil, fmt.Errorf("%s needs a value; see %s --help", own[i-1], command)
			}
			options = append(options, own[i])
		}
	}
	names, c := commandOf(app, words)
	if names == 0 && len(words) > 0 {
		return nil, nil, fmt.Errorf("unknown command %q; see %s --help", words[0], self)
	}
	if slices.Contains(options, "--help") || slices.Contains(options, "-h") {
		return append(append(args[:1:1], words[:names]...), "--help"), nil, nil
	}
	if strings.HasSuffix(c.ArgsUsage, behindDashes) {
		rest, behind = nil, rest
	}
	return slices.Concat(args[:1], words[:names], options, []string{"--"}, words[names:], rest), behind, nil
}

// commandOf returns the command that words begin with, and how many words its name has.
func commandOf(app *cli.App, words []string) (names int, c *cli.Command) {
	c = &cli.Command{Subcommands: app.Commands}
	for ; names < len(words) && c.Command(words[names]) != nil; names++ {
		c = c.Command(words[names])
	}
	return names, c
}

// takesValue reports whether the value of an option is the next word. All commands agree on that.
func takesValue(app *cli.App, option string) (takes bool) {
	see := func(flags []cli.Flag) {
		for _, f := range flags {
			_, alone := f.(*cli.BoolFlag)
			takes = takes || !alone && slices.Contains(f.Names(), strings.TrimLeft(option, "-"))
		}
	}
	see(app.Flags)
	each(app.Commands, func(c *cli.Command) { see(c.Flags) })
	return takes
}

// json prints v on a line.
func (p *program) json(v any) error {
	enc := json.NewEncoder(text.JSON(p.stdout))
	enc.SetEscapeHTML(false)
	return enc.Encode(v)
}

// did prints the result of a command: as a line of text, or as an object with its arguments.
func (p *program) did(args *cli.Context, text string) error {
	if !args.Bool("json") {
		_, err := fmt.Fprintln(p.stdout, text)
		return err
	}
	done := map[string]string{"command": nameOf(args.Command), "text": text}
	for i, word := range strings.Fields(strings.TrimSuffix(args.Command.ArgsUsage, behindDashes)) {
		done[strings.ToLower(word)] = args.Args().Get(i)
	}
	return p.json(done)
}
