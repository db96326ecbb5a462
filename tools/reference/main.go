// reference writes docs/reference/reference.md from the tables in the code: the options of every program, the
// environment variables and the metrics. With -pages it writes, from the same tables, man pages and completions. It
// runs in the repository's root.
package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"dlrover-run/launcher/argv"
)

// pagePath is the file below the root.
const pagePath = "docs/reference/reference.md"

func main() {
	pages := flag.String("pages", "", "`folder` for man pages and completions, instead of the reference")
	version := flag.String("version", "dev", "that man pages name")
	flag.Parse()
	if err := write(*pages, *version); err != nil {
		fmt.Fprintln(os.Stderr, "reference:", err)
		os.Exit(1)
	}
}

func write(pages, version string) error {
	if pages != "" {
		return writePages(".", pages, version)
	}
	text, err := generate(".")
	if err != nil {
		return err
	}
	return os.WriteFile(pagePath, text, 0o644)
}

const introduction = `# Reference

Written by ` + "`make docs`" + ` from the tables in the code; do not edit.

[dlrover-run](#dlrover-run) · [dlrover-master](#dlrover-master) · [checkpointd](#checkpointd) ·
[dlroverctl](#dlroverctl) · [environment](#environment) ·
[metrics](#metrics) · [exit status](#exit-status) · [events](#events)
`

// generate returns the text of the file; root is the folder of the repository.
func generate(root string) ([]byte, error) {
	var b bytes.Buffer
	b.WriteString(introduction)
	launcherOptions(&b)
	dir, err := os.MkdirTemp("", "reference-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	for _, program := range []string{"dlrover-master", "checkpointd", "dlroverctl"} {
		bin, err := build(root, dir, program)
		if err == nil {
			err = programOptions(&b, program, bin)
		}
		if err != nil {
			return nil, err
		}
	}
	environment(&b)
	if err := metrics(&b, root); err != nil {
		return nil, err
	}
	pointers(&b)
	return b.Bytes(), nil
}

// heading begins a section with a table.
func heading(b *bytes.Buffer, title, text string, columns ...string) {
	fmt.Fprintf(b, "\n%s\n\n%s", title, text)
	if text != "" {
		b.WriteString("\n")
	}
	row(b, columns...)
	b.WriteString(strings.Repeat("|---", len(columns)) + "|\n")
}

// row writes a line of a table; it escapes characters that would end a cell.
func row(b *bytes.Buffer, cells ...string) {
	for _, c := range cells {
		b.WriteString(strings.TrimRight("| "+strings.ReplaceAll(c, "|", `\|`), " ") + " ")
	}
	b.WriteString("|\n")
}

func code(s string) string {
	if s == "" {
		return ""
	}
	return "`" + s + "`"
}

const launcherText = "" +
	"`dlrover-run [options] [--] training_script [script arguments]`. Underscores may take the place of dashes, and\n" +
	"unique abbreviations are understood. " +
	"`PET_<OPTION>` in the environment gives an option's default, 0 or 1 that of one\n" +
	"without a value; options marked * have no variable. Torchrun has those without + as well.\n"

func launcherOptions(b *bytes.Buffer) {
	section := ""
	fmt.Fprintf(b, "\n## dlrover-run\n\n%s", launcherText)
	for _, o := range argv.Options() {
		if o.Category != section {
			section = o.Category
			heading(b, "### "+section, "", "option", "default", "what it does")
		}
		name := code(strings.TrimSpace("--" + o.Name + " " + o.Meta))
		if o.Short != 0 {
			name = code("-"+string(o.Short)) + ", " + name
		}
		if o.Extra {
			name += " +"
		}
		if o.Env == "" {
			name += " *"
		}
		row(b, name, code(o.Default), strings.TrimSuffix(o.Usage, " (default: "+o.Default+")"))
	}
}

// build returns the path of a program.
func build(root, dir, program string) (string, error) {
	bin := filepath.Join(dir, program)
	build := exec.Command("go", "build", "-tags=urfave_cli_no_docs", "-o", bin, "./cmd/"+program)
	build.Dir = root
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w: %s", program, err, out)
	}
	return bin, nil
}

// Parts of a help text: where the options begin, with the title of a section, and the names of commands.
const (
	firstOption = `(?m)^(\S.*:)?\n  -`
	commandName = `(?m)^  ([a-z-]+(?: [a-z-]+)?) (?:.*  | )\S`
)

// helpOf gets the help text of a program, or of a command of it: the text before the options, and the options.
func helpOf(bin string, command ...string) (head string, options []option, err error) {
	out, err := exec.Command(bin, append(command, "--help")...).Output()
	head = string(out)
	if begin := regexp.MustCompile(firstOption).FindIndex(out); begin != nil {
		head, options = head[:begin[0]], optionsOf(head[begin[0]:])
	}
	return strings.TrimSpace(head), options, err
}

// option is one, with its value, and its description.
type option struct{ name, text string }

// optionsOf reads the output of package help.
func optionsOf(help string) (all []option) {
	for line := range strings.Lines(help) {
		word := strings.TrimSpace(line)
		switch {
		case strings.HasPrefix(line, "   "):
			last := &all[len(all)-1]
			last.text = strings.TrimSpace(last.text + " " + word)
		case strings.HasPrefix(line, "  -"):
			all = append(all, option{name: word})
		}
	}
	return all
}

// programOptions writes the help of a program and of its commands.
func programOptions(b *bytes.Buffer, program, bin string) error {
	head, options, err := helpOf(bin)
	if err != nil {
		return err
	}
	fmt.Fprintf(b, "\n## %s\n\n```\n%s\n```\n", program, head)
	heading(b, "### Options of "+program, "", "option", "what it does")
	for _, o := range options {
		row(b, code(o.name), o.text)
	}
	var commands []string
	for _, m := range regexp.MustCompile(commandName).FindAllStringSubmatch(head, -1) {
		commands = append(commands, m[1])
	}
	if len(commands) == 0 {
		return nil
	}
	return commandOptions(b, program, bin, commands)
}

// commandOptions writes the options of commands, each once.
func commandOptions(b *bytes.Buffer, program, bin string, commands []string) error {
	var all []option
	of := map[option][]string{}
	for _, c := range commands {
		_, options, err := helpOf(bin, strings.Fields(c)...)
		if err != nil {
			return err
		}
		for _, o := range options {
			if of[o] == nil {
				all = append(all, o)
			}
			of[o] = append(of[o], c)
		}
	}
	heading(b, "### Options of commands of "+program, "", "option", "commands", "what it does")
	for _, o := range all {
		row(b, code(o.name), fewest(of[o], commands), o.text)
	}
	return nil
}

// fewest names some of all words, or those that are missing.
func fewest(some, all []string) string {
	missing := slices.DeleteFunc(slices.Clone(all), func(s string) bool { return slices.Contains(some, s) })
	switch {
	case len(missing) == 0:
		return "all"
	case len(missing) < len(some):
		return "all but " + strings.Join(missing, ", ")
	}
	return strings.Join(some, ", ")
}

func environment(b *bytes.Buffer) {
	heading(b, "## Environment",
		"What the programs read. [What workers get](../start/from-torchrun.md#the-workers-environment).\n",
		"variable", "read by", "meaning")
	for _, v := range variables {
		row(b, code(v.name), v.reader, v.meaning)
	}
}

func pointers(b *bytes.Buffer) {
	b.WriteString("\n## Exit status\n\nOf every program, by policy: [exit status](exit-codes.md).\n" +
		"\n## Events\n\nWhat `--event-log` writes and the rendezvous tells: [the event log](events.md).\n")
}
