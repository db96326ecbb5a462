package main

import (
	"fmt"
	"regexp"
	"strings"

	"dlrover-run/launcher/argv"
)

// completed is an option as shells complete it.
type completed struct {
	long, short, meta, text string
	choices                 []string
}

// options are all options of a program, in its own order.
func (m manual) options() (all []completed) {
	words, known := regexp.MustCompile(`^[a-z-]+(\|[a-z-]+)+$`), map[string][]string{}
	if m.name == launcher {
		for _, o := range argv.Options() {
			known[o.Name] = o.Choices
		}
	}
	for _, s := range m.sections {
		for _, o := range s.options {
			c := completed{text: o.text}
			var forms string
			forms, c.meta, _ = strings.Cut(strings.ReplaceAll(o.name, ", ", ","), " ")
			for form := range strings.SplitSeq(forms, ",") {
				if long, is := strings.CutPrefix(form, "--"); is {
					c.long = long
				} else {
					c.short = strings.TrimPrefix(form, "-")
				}
			}
			if c.choices = known[c.long]; c.choices == nil && words.MatchString(c.meta) {
				c.choices = strings.Split(c.meta, "|")
			}
			all = append(all, c)
		}
	}
	return all
}

func (c completed) isFile() bool { return c.meta == "PATH" || c.meta == "DIR" || c.meta == "FILE" }

// brief is the begin of the text: shells have a line for it.
func (c completed) brief() string {
	return c.text[:len(c.text)-len(regexp.MustCompile(`([;.:] | \().*$`).FindString(c.text))]
}

// bashCompletion is for programs without arguments of their own. bash splits words at "=".
func bashCompletion(m manual) string {
	var names []string
	var cases strings.Builder
	for _, o := range m.options() {
		names = append(names, "--"+o.long)
		switch {
		case len(o.choices) > 0:
			fmt.Fprintf(&cases, "  --%s) COMPREPLY=($(compgen -W '%s' -- \"$cur\")); return ;;\n", o.long,
				strings.Join(o.choices, " "))
		case o.isFile():
			fmt.Fprintf(&cases, "  --%s) compopt -o default; return ;;\n", o.long)
		case o.meta != "":
			fmt.Fprintf(&cases, "  --%s) return ;;\n", o.long)
		}
	}
	return fmt.Sprintf(`# bash completion for %[1]s
_%[2]s() {
  local cur=${COMP_WORDS[COMP_CWORD]} opt=${COMP_WORDS[COMP_CWORD-1]}
  COMPREPLY=()
  [[ $opt != '=' ]] || opt=${COMP_WORDS[COMP_CWORD-2]}
  [[ $cur != '=' ]] || cur=
  case $opt in
%[3]s  esac
  COMPREPLY=($(compgen -W '%[4]s' -- "$cur"))
}
complete -F _%[2]s %[1]s
`, m.name, strings.ReplaceAll(m.name, "-", "_"), cases.String(), strings.Join(names, " "))
}

func zshCompletion(m manual) string {
	escape := strings.NewReplacer(`'`, `'\''`, `[`, `\[`, `]`, `\]`, `:`, `\:`)
	var b strings.Builder
	fmt.Fprintf(&b, "#compdef %s\n_arguments -s -S", m.name)
	for _, o := range m.options() {
		equals, action := "=", ":"+escape.Replace(o.meta)+": "
		switch {
		case len(o.choices) > 0:
			action = ":" + escape.Replace(o.meta) + ":(" + strings.Join(o.choices, " ") + ")"
		case o.isFile():
			action = ":" + o.meta + ":_files"
		case o.meta == "":
			equals, action = "", ""
		}
		fmt.Fprintf(&b, " \\\n  '--%s%s[%s]%s'", o.long, equals, escape.Replace(o.brief()), action)
	}
	return b.String() + "\n"
}

// fishCompletion leaves the arguments of a program to fish, which completes files.
func fishCompletion(m manual) string {
	quote := strings.NewReplacer(`\`, `\\`, `'`, `\'`)
	var b strings.Builder
	fmt.Fprintf(&b, "# fish completion for %s\n", m.name)
	for _, o := range m.options() {
		fmt.Fprintf(&b, "complete -c %s -l %s", m.name, o.long)
		if o.short != "" {
			fmt.Fprintf(&b, " -s %s", o.short)
		}
		switch {
		case len(o.choices) > 0:
			fmt.Fprintf(&b, " -x -a '%s'", strings.Join(o.choices, " "))
		case o.isFile():
			b.WriteString(" -r -F")
		case o.meta != "":
			b.WriteString(" -x")
		}
		fmt.Fprintf(&b, " -d '%s'\n", quote.Replace(o.brief()))
	}
	return b.String()
}
