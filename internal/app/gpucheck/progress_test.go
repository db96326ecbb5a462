package gpucheck

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"dlrover-run/switchbox"
)

// watched runs body under a watchdog of ten seconds and returns what was printed and with what status it exited, if so.
func watched(t *testing.T, body func(p *progress)) (reports []switchbox.Report, status int) {
	synctest.Test(t, func(t *testing.T) {
		status = -1
		p := newProgress(func(r switchbox.Report) { reports = append(reports, r) })
		stop := p.watch(10*time.Second, func(s int) { status = s })
		defer stop()
		body(p)
		synctest.Wait()
	})
	return reports, status
}

func TestWatchdogBlamesACallThatHangs(t *testing.T) {
	reports, status := watched(t, func(p *progress) {
		p.keep(switchbox.Report{Adaptor: adaptor, Driver: "NVIDIA 550"})
		p.doing("check", "asking GPU 3 for Fabric")
		time.Sleep(10 * time.Second)
	})
	require.Equal(t, exitTimeout, status)
	require.Len(t, reports, 1)
	require.Equal(t, switchbox.Faulty, reports[0].State)
	require.Equal(t, "the driver does not answer: asking GPU 3 for Fabric takes more than 10s", reports[0].Reason)
	require.Equal(t, "NVIDIA 550", reports[0].Driver, "what is known is told")
}

// Of pairs that are copied at the same time the one that hangs is named.
func TestWatchdogNamesTheOldestStep(t *testing.T) {
	reports, _ := watched(t, func(p *progress) {
		p.doing("0:1", "copying from GPU 0 to GPU 1")
		time.Sleep(time.Second)
		p.doing("2:3", "copying from GPU 2 to GPU 3")
		time.Sleep(time.Second)
		p.doing("0:1", "")
		time.Sleep(8 * time.Second)
	})
	require.Equal(t, "the driver does not answer: copying from GPU 2 to GPU 3 takes more than 9s", reports[0].Reason)
}

// Much to do is no hang.
func TestWatchdogBlamesNobodyForManySteps(t *testing.T) {
	reports, status := watched(t, func(p *progress) {
		for range 6 {
			p.doing("check", "preparing GPU 7 for copies")
			time.Sleep(1900 * time.Millisecond)
		}
	})
	require.Equal(t, exitTimeout, status)
	require.Equal(t, switchbox.Skipped, reports[0].State)
	require.Equal(t, "not done within 10s; at the end: preparing GPU 7 for copies", reports[0].Reason)
	reports, _ = watched(t, func(*progress) { time.Sleep(10 * time.Second) })
	require.Equal(t, "not done within 10s", reports[0].Reason)
}

func TestWatchdogIsSilentAfterTheReport(t *testing.T) {
	reports, status := watched(t, func(p *progress) {
		p.finish(switchbox.Skip(adaptor, "no driver"))
		time.Sleep(time.Minute)
	})
	require.Len(t, reports, 1)
	require.Equal(t, -1, status)
}
