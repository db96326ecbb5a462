package run

import (
	"fmt"

	"dlrover-run/internal/console"
	"dlrover-run/launcher/argv"
	"dlrover-run/launcher/argv/native"
)

// logSettings are the places of the launcher's lines and of the workers' output.
type logSettings struct {
	format         console.Format // of the launcher's own lines
	dir            string
	redirects, tee argv.StdMap
	ranks          map[int]bool // with their output on the console; nil: all
	rankFile       string       // that of rank 0; "": there are none
	outFilters     []string
	errFilters     []string
	prefix         string
	rotateSize     int64
	rotateCount    int
}

// files reports whether output of any of the workers goes to a file.
func (l *logSettings) files(workers int) bool {
	for i := range workers {
		if l.redirects.For(i) != 0 || l.tee.For(i) != 0 {
			return true
		}
	}
	return false
}

// readLogging reads the options. ranks are those of another launcher's command line.
func readLogging(o *options, ranks *native.RankLogs) (l logSettings, err error) {
	l.dir = o.String("log-dir")
	if l.redirects, err = argv.ParseStd("--redirects", o.String("redirects")); err != nil {
		return l, err
	}
	if l.tee, err = argv.ParseStd("--tee", o.String("tee")); err != nil {
		return l, err
	}
	if l.ranks, err = argv.ParseRanks(o.String("local-ranks-filter")); err != nil {
		return l, err
	}
	l.outFilters = argv.ParseFilters(o.String("duplicate-stdout-filters"))
	l.errFilters = argv.ParseFilters(o.String("duplicate-stderr-filters"))
	if l.prefix = o.String("log-line-prefix-template"); l.prefix == "" {
		l.prefix = o.Lookup("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE")
	}
	if l.format, err = console.ParseFormat(o.String("log-format")); err != nil {
		return l, err
	}
	if ranks != nil {
		l.ranks, l.rankFile = map[int]bool{}, ranks.Path(0, 0)
		for _, rank := range ranks.Console {
			l.ranks[rank] = true
		}
	}
	return l, l.readRotation(o)
}

func (l *logSettings) readRotation(o *options) (err error) {
	if text := o.String("log-rotate-size"); text != "" {
		if l.rotateSize, err = argv.ParseSize(text); err != nil {
			return fmt.Errorf("--log-rotate-size: %w", err)
		}
	}
	if l.rotateCount = o.Int("log-rotate-count"); l.rotateCount < 1 {
		return fmt.Errorf("--log-rotate-count=%d: need at least 1", l.rotateCount)
	}
	return nil
}
