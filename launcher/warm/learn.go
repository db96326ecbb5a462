package warm

import (
	"encoding/json"
	"errors"
	"os"
	"slices"

	"dlrover-run/internal/openfile"
)

// maxLearned bounds a worker's report of its imports, in bytes.
const maxLearned = 4 << 20

// learned is a worker's report of itself.
type learned struct {
	Why     string             `json:"why"`     // the event that it follows; "": no report
	Modules []string           `json:"modules"` // in the order of the imports
	Env     map[string]*string `json:"env"`     // variables that it has changed; nil: deleted
}

// The events.
const (
	firstStep = "step"
	atExit    = "exit"
)

// set are the changes of variables that are read at imports, as an environment.
func (l learned) set() (env []string) {
	for name, value := range l.Env {
		if value != nil && len(atImport([]string{name + "=" + *value})) > 0 {
			env = append(env, name+"="+*value)
		}
	}
	slices.Sort(env)
	return env
}

// Learned looks for a worker's report of its imports, once for every start.
func (s *Spawner) Learned() bool {
	l, err := readLearned(s.learnFile())
	if errors.Is(err, os.ErrNotExist) {
		return false
	}
	if err != nil {
		s.cfg.Log.Warn("warm workers: cannot read what a worker has imported", "err", err)
	}
	s.began(l)
	return true
}

func readLearned(path string) (l learned, err error) {
	text, err := openfile.Read(path, maxLearned)
	if err == nil {
		err = json.Unmarshal(text, &l)
	}
	return l, err
}
