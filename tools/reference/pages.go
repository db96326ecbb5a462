package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"dlrover-run/launcher/argv"
)

// manual is the content of a man page.
type manual struct {
	name, short string
	synopsis    []string
	about       []string // paragraphs
	sections    []section
	commands    []command
	bin         string // path of the program
}

// section is a heading and its options.
type section struct {
	title   string
	options []option
}

type command struct {
	usage, short string // without the program
	about        []string
	options      []option
}

// writePages writes man pages into man/, and completions into a folder for each shell.
func writePages(root, dir, version string) error {
	bins, err := os.MkdirTemp("", "reference-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(bins)
	for _, program := range []string{"dlrover-run", "dlrover-master", "checkpointd", "dlroverctl", "gpucheck"} {
		m, err := manualOf(root, bins, program)
		if err != nil {
			return fmt.Errorf("%s: %w", program, err)
		}
		files, err := completionsOf(m)
		if err != nil {
			return fmt.Errorf("completion of %s: %w", program, err)
		}
		statuses, err := exitStatuses(root, program)
		if err != nil {
			return err
		}
		files["man/"+program+".1"] = manPage(m, statuses, version)
		for name, text := range files {
			path := filepath.Join(dir, name)
			if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
				return err
			}
		}
	}
	return nil
}

// manualOf reads the table of the launcher's options, or the help of another program.
func manualOf(root, bins, program string) (m manual, err error) {
	m.name = program
	if m.bin, err = build(root, bins, program); err != nil {
		return m, err
	}
	head, options, err := helpOf(m.bin)
	if err != nil {
		return m, err
	}
	m.head(head)
	if program == "dlrover-run" {
		m.sections = launcherSections()
		return m, nil
	}
	if program == "gpucheck" { // its help is package flag's, with one dash
		for i, o := range options {
			_, meta, _ := strings.Cut(o.name, " ")
			options[i] = option{"-" + o.name, strings.TrimPrefix(strings.TrimPrefix(o.text, meta+": "), meta+" ...: ")}
		}
	}
	m.sections = []section{{"", options}}
	for _, found := range commandNames(head) {
		head, options, err := helpOf(m.bin, strings.Fields(found)...)
		if err != nil {
			return m, err
		}
		var c manual
		c.head(head)
		usage := strings.TrimPrefix(c.synopsis[0], program+" ")
		m.commands = append(m.commands, command{usage, c.short, c.about, options})
	}
	return m, nil
}

// launcherSections are the options of dlrover-run under their headings.
func launcherSections() (all []section) {
	for _, o := range argv.Options() {
		if len(all) == 0 || all[len(all)-1].title != o.Category {
			all = append(all, section{title: o.Category})
		}
		name := strings.TrimSpace("--" + o.Name + " " + o.Meta)
		if o.Short != 0 {
			name = "-" + string(rune(o.Short)) + ", " + name
		}
		last := &all[len(all)-1]
		last.options = append(last.options, option{name, o.Usage})
	}
	return all
}

// head reads the text in front of the options: name and purpose, the usage, and paragraphs up to the list of commands.
func (m *manual) head(text string) {
	if before, _, found := strings.Cut(text, ":\n  "); found { // a heading, and commands below it
		text = before[:strings.LastIndex(before, "\n\n")+1]
	}
	paragraphs := strings.Split(strings.TrimSpace(text), "\n\n")
	_, m.short, _ = strings.Cut(paragraphs[0], " - ")
	if usage, short, found := strings.Cut(paragraphs[0], ": "); m.short == "" && found { // package flag's, of gpucheck
		m.synopsis, m.short = []string{usage}, short
	}
	for _, p := range paragraphs[1:] {
		if usage, is := strings.CutPrefix(p, "usage: "); is {
			m.synopsis = append(m.synopsis, usage)
			continue
		}
		m.about = append(m.about, strings.Join(strings.Fields(p), " "))
	}
}

// commandNames are the commands in a help text.
func commandNames(head string) (names []string) {
	for _, match := range regexp.MustCompile(commandName).FindAllStringSubmatch(head, -1) {
		names = append(names, match[1])
	}
	return names
}

// exitStatuses are the rows of a program's table in the page about them.
func exitStatuses(root, program string) (rows []option, err error) {
	if program != "dlrover-run" {
		return nil, nil
	}
	data, err := os.ReadFile(filepath.Join(root, "docs/reference/exit-codes.md"))
	if err != nil {
		return nil, err
	}
	_, table, _ := strings.Cut(string(data), "`--exit-code-policy=reason`:")
	table, _, _ = strings.Cut(strings.TrimSpace(table), "\n\n")
	for _, m := range regexp.MustCompile(`(?m)^\| ([0-9n+]+) \| (.*) \|$`).FindAllStringSubmatch(table, -1) {
		rows = append(rows, option{m[1], m[2]})
	}
	return rows, nil
}

// completionsOf are a program's completions by their paths. Those that it prints itself are taken from it.
func completionsOf(m manual) (map[string]string, error) {
	files := map[string]string{
		"bash/" + m.name:           bashCompletion(m),
		"zsh/_" + m.name:           zshCompletion(m),
		"fish/" + m.name + ".fish": fishCompletion(m),
	}
	printed := map[string][]string{"dlrover-run": {"bash", "zsh"}, "dlroverctl": {"bash", "zsh", "fish"}}
	for path := range files {
		if shell := filepath.Dir(path); slices.Contains(printed[m.name], shell) {
			out, err := exec.Command(m.bin, "--print-completion="+shell).Output()
			if err != nil {
				return nil, err
			}
			files[path] = string(out)
		}
	}
	return files, nil
}
