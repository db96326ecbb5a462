package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// examples are the ones that a man page ends with: a line about each, and the command.
var examples = map[string][][2]string{
	"dlrover-run": {
		{"A worker for each GPU of this machine:", "dlrover-run --nproc-per-node=auto train.py --lr 0.1"},
		{"The same on each of two to four nodes; node0 serves the rendezvous:", "export DLROVER_TOKEN=...   # " +
			"from: openssl rand -hex 16\ndlrover-run --nnodes=2:4 --nproc-per-node=8 --max-restarts=3 \\\n    " +
			"--rdzv-backend=c10d --rdzv-endpoint=node0:29400 --rdzv-id=job1 train.py"},
		{"Print the plan, and start nothing:", "dlrover-run --dry-run --nproc-per-node=2 train.py"},
	},
	"dlrover-master": {
		{"Serve all nodes, and keep what is decided:", "DLROVER_TOKEN=... dlrover-master --listen=:50001 " +
			"--data-dir=/var/lib/dlrover-master"},
		{"The same as a service of systemd, after DLROVER_TOKEN is set in /etc/default/dlrover-master:",
			"systemctl enable --now dlrover-master"},
	},
	"checkpointd": {
		{"A sidecar of a launcher with --ckpt-sidecar=job1:", "checkpointd --job=job1"},
	},
	"dlroverctl": {
		{"", "export DLROVER_MASTER_ADDR=node0:29400 DLROVER_TOKEN=..."},
		{"The nodes of a job, its restarts, the age of its checkpoints:", "dlroverctl status job1"},
		{"The rank that failed first, and why:", "dlroverctl verdict job1"},
		{"The output of all workers:", "dlroverctl logs job1 -f"},
	},
	"gpucheck": {
		{"The driver's answers, and copies between pairs of GPUs:", "gpucheck --level=copy"},
		{"Two pairs, each of which has to reach 10 GB/s:", "gpucheck --pairs 0:1 2:3 --min-bandwidth=10000 --min-channels=2"},
	},
}

// roff writes a man page. It uses a few macros of man(7). go-md2man, which urfave/cli has for this, would be 8,000
// lines that make the same macros of Markdown, for which each text would have to be escaped first.
type roff struct{ strings.Builder }

// escaped is text without meaning to roff. A dash is one that can be copied into a command line.
func escaped(s string) string {
	return strings.NewReplacer(`\`, `\e`, "-", `\-`, "\n.", "\n\\&.", "\n'", "\n\\&'").Replace(s)
}

// text writes a paragraph: Markdown's code in bold, its links as their words, and none that only lead to other pages.
func (r *roff) text(s string) {
	s = regexp.MustCompile(`; (see )?\[[^]]+\]\([^)]+\)(; )?`).ReplaceAllString(s, "$2")
	s = regexp.MustCompile(`\[([^]]+)\]\([^)]+\)`).ReplaceAllString(s, "$1")
	s = escaped(s)
	s = regexp.MustCompile("`([^`]*)`").ReplaceAllString(s, `\fB$1\fR`)
	if strings.HasPrefix(s, ".") || strings.HasPrefix(s, "'") {
		s = `\&` + s
	}
	r.WriteString(s + "\n")
}

func (r *roff) heading(title string) { fmt.Fprintf(r, ".SH %s\n", strings.ToUpper(escaped(title))) }

// option writes an option in bold, with its value in italics, and its text.
func (r *roff) option(o option) {
	r.WriteString(".TP\n")
	forms, meta, _ := strings.Cut(strings.ReplaceAll(o.name, ", ", ",\x00"), " ")
	forms = escaped(strings.ReplaceAll(forms, ",\x00", ", "))
	fmt.Fprintf(r, `\fB%s\fR`, strings.ReplaceAll(forms, ", ", `\fR, \fB`))
	if meta != "" {
		fmt.Fprintf(r, ` \fI%s\fR`, escaped(meta))
	}
	r.WriteString("\n")
	r.text(o.text)
}

// manPage is the page of section 1.
func manPage(m manual, statuses []option, version string) string {
	var r roff
	fmt.Fprintf(&r, ".TH %s 1 \"\" \"dlrover\\-run %s\" \"User Commands\"\n.nh\n.ad l\n", strings.ToUpper(escaped(m.name)),
		escaped(version))
	r.heading("Name")
	fmt.Fprintf(&r, "%s \\- %s\n", escaped(m.name), escaped(m.short))
	r.heading("Synopsis")
	for _, usage := range m.synopsis {
		fmt.Fprintf(&r, "\\fB%s\\fR%s\n", escaped(m.name), escaped(strings.TrimPrefix(usage, m.name)))
	}
	if len(m.about) > 0 {
		r.heading("Description")
	}
	for i, p := range m.about {
		if i > 0 {
			r.WriteString(".PP\n")
		}
		r.text(p)
	}
	r.options(m)
	r.commands(m)
	r.variables(m.name)
	if len(statuses) > 0 {
		r.heading("Exit status")
		r.text("With `--exit-code-policy=torchrun`, the default: 0, 2 if the command line or the environment is wrong, " +
			"else 1. With `--exit-code-policy=reason`:")
		for _, s := range statuses {
			r.option(s)
		}
	}
	r.ending(m.name)
	return r.String()
}

func (r *roff) options(m manual) {
	r.heading("Options")
	for _, s := range m.sections {
		if s.title != "" {
			fmt.Fprintf(r, ".SS %s\n", escaped(s.title))
		}
		for _, o := range s.options {
			r.option(o)
		}
	}
}

// commands writes each with the options that it does not share with all others.
func (r *roff) commands(m manual) {
	if len(m.commands) == 0 {
		return
	}
	shared := m.shared()
	r.heading("Options of commands")
	r.text("Commands that connect to a daemon have these; the others have those that apply to them.")
	for _, o := range shared {
		r.option(o)
	}
	r.heading("Commands")
	for _, c := range m.commands {
		words := strings.TrimSuffix(c.usage, " [options]")
		fmt.Fprintf(r, ".SS %s\n", escaped(words))
		r.text(strings.ToUpper(c.short[:1]) + c.short[1:] + ".")
		for _, p := range c.about {
			r.WriteString(".PP\n")
			r.text(p)
		}
		for _, o := range c.options {
			if !slices.Contains(shared, o) {
				r.option(o)
			}
		}
	}
}

// shared are the options of more than half of the commands, which are described once.
func (m manual) shared() (all []option) {
	count := map[option]int{}
	for _, c := range m.commands {
		for _, o := range c.options {
			if count[o]++; count[o] == len(m.commands)/2+1 {
				all = append(all, o)
			}
		}
	}
	return all
}

// variables writes the environment variables that a program reads.
func (r *roff) variables(program string) {
	titled := false
	for _, v := range variables {
		except, but := strings.CutPrefix(v.reader, every+" but ")
		reads := v.reader == every || but && except != program ||
			slices.Contains(strings.Split(v.reader, ", "), program)
		if !reads || program == "gpucheck" { // it has no part in a job
			continue
		}
		if !titled {
			r.heading("Environment")
			titled = true
		}
		r.option(option{v.name, v.meaning})
	}
}

// ending writes examples, and the other pages.
func (r *roff) ending(program string) {
	r.heading("Examples")
	for i, e := range examples[program] {
		if i > 0 {
			r.WriteString(".PP\n")
		}
		if e[0] != "" {
			r.text(e[0])
		}
		fmt.Fprintf(r, ".PP\n.RS\n.nf\n%s\n.fi\n.RE\n", escaped(e[1]))
	}
	r.heading("See also")
	var others []string
	for _, name := range []string{"checkpointd", "dlrover-master", "dlrover-run", "dlroverctl", "gpucheck"} {
		if name != program {
			others = append(others, fmt.Sprintf(`\fB%s\fR(1)`, escaped(name)))
		}
	}
	r.WriteString(strings.Join(others, ", ") + "\n")
}
