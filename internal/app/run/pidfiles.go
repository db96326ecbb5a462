package run

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"dlrover-run/internal/app/run/feature"
	"dlrover-run/internal/openfile"
)

// pidFiles have the launcher's process id while it runs: a signal to it ends the job.
type pidFiles struct {
	paths []string
	text  string
}

func pidFilesFeature() row {
	var names []string
	return row{
		name:     "pid files",
		settings: func(o *options, s *settings) error { names = s.called.command.PIDFiles; return nil },
		open: func(j *nodeJob) (*feature.Opened, error) {
			if len(names) == 0 {
				return nil, nil
			}
			command := os.Getpid()
			if j.guard != nil {
				command = os.Getppid()
			}
			p, err := writePIDFiles(names, command)
			if err != nil {
				return nil, feature.Unusable(err)
			}
			j.log.Info("launcher pid: "+p.text, "files", strings.Join(p.paths, " "))
			return &feature.Opened{Close: p.close}, nil
		},
	}
}

func writePIDFiles(names []string, command int) (*pidFiles, error) {
	p := &pidFiles{text: strconv.Itoa(os.Getpid())}
	for _, name := range names {
		path := strings.ReplaceAll(name, "{pid}", strconv.Itoa(command))
		if err := openfile.Replace(path, []byte(p.text), 0o644); err != nil {
			return nil, errors.Join(fmt.Errorf("file for the launcher's process id: %w", err), p.close())
		}
		p.paths = append(p.paths, path)
	}
	return p, nil
}

func (p *pidFiles) close() error {
	var errs []error
	for _, path := range p.paths {
		if text, err := openfile.Read(path, int64(len(p.text))); err == nil && string(text) == p.text {
			errs = append(errs, os.Remove(path))
		}
	}
	return errors.Join(errs...)
}
