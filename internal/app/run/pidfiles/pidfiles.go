// Package pidfiles writes the process id of the launcher to files.
package pidfiles

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/openfile"
)

// files have the launcher's process id while it runs: a signal to it ends the job.
type files struct {
	paths []string
	text  string
}

// New is the feature.
func New() feature.Feature {
	var names []string
	return feature.Feature{
		Name:     "pid files",
		Settings: func(o feature.Options) error { names = o.Job().Command.PIDFiles; return nil },
		Open: func(n feature.Node) (*feature.Opened, error) {
			if len(names) == 0 {
				return nil, nil
			}
			p, err := write(names, n.PID())
			if err != nil {
				return nil, feature.Unusable(err)
			}
			n.Log().Info("launcher pid: "+p.text, "files", strings.Join(p.paths, " "))
			return &feature.Opened{Close: p.close}, nil
		},
	}
}

func write(names []string, command int) (*files, error) {
	p := &files{text: strconv.Itoa(os.Getpid())}
	for _, name := range names {
		path := strings.ReplaceAll(name, "{pid}", strconv.Itoa(command))
		if err := openfile.Replace(path, []byte(p.text), 0o644); err != nil {
			return nil, errors.Join(fmt.Errorf("file for the launcher's process id: %w", err), p.close())
		}
		p.paths = append(p.paths, path)
	}
	return p, nil
}

func (p *files) close() error {
	var errs []error
	for _, path := range p.paths {
		if text, err := openfile.Read(path, int64(len(p.text))); err == nil && string(text) == p.text {
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}
